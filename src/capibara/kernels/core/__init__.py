"""What an op is, its dispatch, and the wrapping that lets a kernel be differentiated, batched and put on a mesh."""
