/* What a guest needs from an accelerator, in 300 bytes: from the reset vector through protected
 * mode into 64-bit mode with paging, an exception through an IDT, CMPXCHG16B (where instruction
 * emulators give up), SSE, reloads of CR3, CPUID, and twenty million loop turns (10 ms on a
 * processor, 0.1 s under TCG, half a minute where every instruction is emulated). Passing means
 * that kernels run at speed; it does not prove every device.
 *
 * The image is mapped at 0xffff0000; low memory is RAM: 0x7000 stack, 0x8000 IDT, 0xa000 data,
 * 0x10000.. tables. */
#include "vm/accel_guest.h"
#include <string.h>

#if defined(__x86_64__)
extern const uint8_t vm_accel_guest_code[], vm_accel_guest_end[];
__asm__(".pushsection .rodata\n"
        ".balign 16\n"
        ".globl vm_accel_guest_code\n"
        ".globl vm_accel_guest_end\n"
        "vm_accel_guest_code:\n"
        "    .code16\n"
        "    cli\n"
        "    lgdtl %cs:(.Lgdtr - vm_accel_guest_code)\n"
        "    movl %cr0, %eax\n"
        "    orl $1, %eax\n"
        "    movl %eax, %cr0\n"
        "    ljmpl $0x08, $(.Lprotected - vm_accel_guest_code + 0xffff0000)\n"
        "    .code32\n"
        ".Lprotected:\n"
        "    movl $0x10, %eax\n"
        "    movl %eax, %ds\n"
        "    movl %eax, %es\n"
        "    movl %eax, %ss\n"
        "    movl $0x7000, %esp\n"
        /* identity map of the first and the last 2 MiB below 4 GiB */
        "    movl $0x11003, 0x10000\n"
        "    movl $0x12003, 0x11000\n"
        "    movl $0x13003, 0x11018\n"
        "    movl $0x00000083, 0x12000\n"
        "    movl $0xffe00083, 0x13ff8\n"
        "    movl %cr4, %eax\n"
        "    orl $0x620, %eax\n" /* PAE, OSFXSR, OSXMMEXCPT */
        "    movl %eax, %cr4\n"
        "    movl $0x10000, %eax\n"
        "    movl %eax, %cr3\n"
        "    movl $0xc0000080, %ecx\n" /* EFER.LME */
        "    rdmsr\n"
        "    orl $0x100, %eax\n"
        "    wrmsr\n"
        "    movl %cr0, %eax\n"
        "    andl $~4, %eax\n"
        "    orl $0x80000002, %eax\n"
        "    movl %eax, %cr0\n"
        "    ljmpl $0x18, $(.Llong - vm_accel_guest_code + 0xffff0000)\n"
        "    .code64\n"
        ".Llong:\n"
        /* an exception through an interrupt gate */
        "    movl $(.Ltrap - vm_accel_guest_code + 0x180000), 0x8030\n"
        "    movl $0xffff8e00, 0x8034\n"
        "    movl $0, 0x8038\n"
        "    movw $0xfff, 0x9ff0\n"
        "    movq $0x8000, 0x9ff2\n"
        "    lidt 0x9ff0\n"
        "    xorl %r15d, %r15d\n"
        "    int3\n"
        "    cmpl $1, %r15d\n"
        "    jne .Lfailed\n"
        /* 16-byte compare and exchange */
        "    movl $1000, %esi\n"
        "1:  movq 0xa000, %rax\n"
        "    movq 0xa008, %rdx\n"
        "    leaq 1(%rax), %rbx\n"
        "    movq %rdx, %rcx\n"
        "    lock cmpxchg16b 0xa000\n"
        "    jne .Lfailed\n"
        "    decl %esi\n"
        "    jnz 1b\n"
        /* SSE */
        "    movaps 0xa000, %xmm0\n"
        "    paddq %xmm0, %xmm0\n"
        "    movaps %xmm0, 0xa010\n"
        "    cmpq $2000, 0xa010\n"
        "    jne .Lfailed\n"
        /* address space switches, CPUID */
        "    movl $1000, %esi\n"
        "1:  movq %cr3, %rax\n"
        "    movq %rax, %cr3\n"
        "    decl %esi\n"
        "    jnz 1b\n"
        "    xorl %eax, %eax\n"
        "    cpuid\n"
        "    testl %eax, %eax\n"
        "    jz .Lfailed\n"
        /* speed */
        "    movl $20000000, %ecx\n"
        "1:  decl %ecx\n"
        "    jnz 1b\n"
        "    movb $0x31, %al\n"
        "    jmp .Lexit\n"
        ".Lfailed:\n"
        "    movb $0x10, %al\n"
        ".Lexit:\n"
        "    outb %al, $0xf4\n"
        "1:  hlt\n"
        "    jmp 1b\n"
        ".Ltrap:\n"
        "    incl %r15d\n"
        "    iretq\n"
        "    .balign 8\n"
        ".Lgdt:\n"
        "    .quad 0\n"
        "    .quad 0x00cf9b000000ffff\n" /* 08: 32-bit code */
        "    .quad 0x00cf93000000ffff\n" /* 10: data */
        "    .quad 0x00af9b000000ffff\n" /* 18: 64-bit code */
        ".Lgdtr:\n"
        "    .word 31\n"
        "    .long .Lgdt - vm_accel_guest_code + 0xffff0000\n"
        "vm_accel_guest_end:\n"
        "    .popsection\n");
#else
static const uint8_t vm_accel_guest_code[1], *const vm_accel_guest_end = vm_accel_guest_code;
#endif

void vm_accel_guest_image(uint8_t ret[VM_ACCEL_GUEST_SIZE])
{
    /* jmp to offset 0: the instruction pointer wraps in 16 bits */
    static const uint8_t reset[] = { 0xe9, 0x0d, 0x00 };

    memset(ret, 0, VM_ACCEL_GUEST_SIZE);
    memcpy(ret, vm_accel_guest_code, (size_t)(vm_accel_guest_end - vm_accel_guest_code));
    memcpy(ret + 0xfff0, reset, sizeof(reset));
}
