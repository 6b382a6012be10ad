"""What a pipeline is planned from: a model by layers, and seconds of each layer, measured or estimated."""
