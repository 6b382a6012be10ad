"""Flower's PyTorch quickstart in message-API form, written afresh; `diff -r before after` is its way to groups."""
