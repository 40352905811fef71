"""Loading and running models: SavedModel, LiteRT, ONNX."""
