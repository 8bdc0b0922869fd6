"""tenuto_client"""
