"""The plan: what will happen to each column, from the first rows and what the user says."""
