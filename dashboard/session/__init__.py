"""Sessions: who the viewer is, which page and run are open, and edits that are not sent yet."""
