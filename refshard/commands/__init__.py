"""One file per command: joins the rooms below into what the command line offers."""
