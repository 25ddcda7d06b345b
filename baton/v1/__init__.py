"""Generated from proto/ by tools/generate_proto.py."""
