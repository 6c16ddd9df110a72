"""Reports for people: words for their numbers, a short table in notebooks, and the page of `ckptz report`."""
