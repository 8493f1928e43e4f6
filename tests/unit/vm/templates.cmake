# Recipes, store and template builder.
foreach(file recipe store template initramfs template_run image)
    cv_unit_test(vm ${file} DEPENDS vm)
endforeach()
# The whole builder, with stand-ins for apt, dpkg, mmdebstrap and QEMU.
cv_unit_test(vm template_build DEPENDS vm TIMEOUT 300)
target_compile_definitions(test_vm_template_build
    PRIVATE FAKE_TOOLS="${CMAKE_CURRENT_SOURCE_DIR}/fake_tools.sh")
