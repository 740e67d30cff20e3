"""Who calls, and what they may do: principals, credentials, roles, the table of permissions."""
