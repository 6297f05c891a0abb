"""All products between one attention and the next, of a row that is decoded: the op `between_attentions`."""
