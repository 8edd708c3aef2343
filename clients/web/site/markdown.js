import{b as a}from"./chunk-4HGLD3XT.js";import"./chunk-HQULGRJA.js";import"./chunk-OOJM4CTU.js";export{a as Answer};
