"""tenuto_engine"""
