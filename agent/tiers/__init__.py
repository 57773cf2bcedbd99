"""Storage paths for optimizer state: files and objects, transfers, locks between processes, scratch directories."""
