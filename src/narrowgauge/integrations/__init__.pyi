from narrowgauge.integrations.check.findings import SetUpWarning as SetUpWarning
