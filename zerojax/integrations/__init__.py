"""What flax users need beyond plain pytrees: one module for linen, one for nnx."""
