"""Opening, reading, saving and applying files, for all frameworks alike."""
