"""Opening, reading, describing, saving and applying files, for all frameworks."""
