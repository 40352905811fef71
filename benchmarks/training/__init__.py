"""Step time, memory and start-up of the training engine beside a bare step, Keras `fit`, PyTorch and Keras on JAX."""
