"""Each test is a sentence about what ckptz does; `support` holds what several of them use."""
