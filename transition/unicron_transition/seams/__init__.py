"""Every private name and every patch of torch and Megatron. No other package here uses one."""
