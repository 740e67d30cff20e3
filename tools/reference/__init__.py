"""The pages of docs/reference, made from the code: ``make docs``. A test compares them with what is
committed."""
