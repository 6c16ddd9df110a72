"""Reports as pages: HTML with charts that needs no other file and no network, and what notebooks show."""
