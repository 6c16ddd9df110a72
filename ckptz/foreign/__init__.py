"""Files and folders of other formats, read and written without running code."""
