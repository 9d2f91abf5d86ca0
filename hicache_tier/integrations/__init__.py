"""Adapters to engines. Each imports its engine, and nothing else imports them."""
