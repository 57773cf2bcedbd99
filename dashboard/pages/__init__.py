"""The pages of the live view, one module each: which sections there are and where."""
