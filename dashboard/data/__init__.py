"""Data of the screens: read from the daemon, cached, and turned into figures. Nothing is drawn here."""
