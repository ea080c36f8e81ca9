"""What was not sent, and how it comes back."""
