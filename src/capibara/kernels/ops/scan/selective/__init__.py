"""The selective scan of Mamba, and its single step for decoding."""
