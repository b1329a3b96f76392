"""Every private name and every patch of torch and Megatron."""
