"""States: nested ones as named tensors and a tree of plain values, and the arrays that tensors become."""
