"""What this distribution adds to the `tenuto` command."""
