"""Flower's Hugging Face quickstart in message-API form, offline; `diff -r before after` is its way to groups."""
