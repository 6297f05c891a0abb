"""Every op at the shapes of published models: what `capibara kernels bench --models` draws, times and keeps."""
