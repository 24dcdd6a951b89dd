"""Pages: figures and tables of runs, diagnoses and plans, as documents that open from disk."""
