"""One file for each version of the tables. A released one never changes."""
