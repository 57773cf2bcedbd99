"""Sessions: browser sessions and one-time codes, the page's daemon, run and rank, and edits that are not sent yet."""
