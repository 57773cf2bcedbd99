"""The pages of the live view, one module each: the sections of a page and their layout."""
