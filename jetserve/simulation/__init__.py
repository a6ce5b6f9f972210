"""The real scheduler and pool on a simulated device: capacity planning without a chip. Imports no jax."""
