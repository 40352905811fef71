"""`python -m serving.client`."""

from serving.client.commands import main

main()
