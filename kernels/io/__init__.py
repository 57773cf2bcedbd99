"""Direct I/O: reads and writes of files by native threads, bypassing the page cache."""
