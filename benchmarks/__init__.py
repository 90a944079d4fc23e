"""What is measured, and against whom: a table, JSON, and exit code 1 for a failed bound."""
