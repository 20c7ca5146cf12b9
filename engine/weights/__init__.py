"""From a model's name to filled tensors: catalogue, file formats, and the one loader."""
