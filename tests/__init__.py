"""Tests of ckptz. The name of a test states one behaviour; `support` has the code that tests share."""
