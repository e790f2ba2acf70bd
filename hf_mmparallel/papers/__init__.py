"""What papers do, for comparison: methods that users choose by name, see `plan/methods.py`. Nothing imports them."""
