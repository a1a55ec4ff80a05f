"""What each correction's gradient is in expectation, by enumeration instead of sampling: no error bars."""
