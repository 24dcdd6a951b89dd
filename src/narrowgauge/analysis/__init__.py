"""From the rows of runs to findings: while a run goes on, between two runs, and after one."""
