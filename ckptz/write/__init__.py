"""The one way to write a file: tensors and what is known of them go in, a file and one report come out."""
