"""Direct I/O: reads and writes around the page cache by native threads."""
