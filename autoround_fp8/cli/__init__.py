"""Command line: flags -> settings -> one call. No numerics here."""
