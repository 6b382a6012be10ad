"""A module and a trainer in the style of Lightning under FedAvg; `diff -r before after` is its way to groups."""
