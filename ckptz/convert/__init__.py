"""Files and folders of other formats to `.ckptz` and back."""
