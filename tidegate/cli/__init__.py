"""The command line `tidegate`: one module for each group of commands."""
