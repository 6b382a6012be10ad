"""Small image classifiers, an image generator and a click model; torch.fx can capture each of them."""
